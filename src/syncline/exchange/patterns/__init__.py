"""The exchange patterns, one per file; importing this package imports, and so registers, all of them."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
