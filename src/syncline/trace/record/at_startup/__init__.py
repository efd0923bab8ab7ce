"""A folder for PYTHONPATH, whose `sitecustomize` records the training of any Python process."""
