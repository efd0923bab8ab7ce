"""The version of Syncline."""

VERSION = "0.1.0"
