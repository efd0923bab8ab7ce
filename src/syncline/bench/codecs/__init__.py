"""`bench codecs`: speed, ratio and error of every codec."""
