"""Measurements of parts: codecs and operators as fractions of a copy, in the same run."""
