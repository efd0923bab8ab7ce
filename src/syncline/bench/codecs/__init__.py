"""`bench codecs`: speed, compression ratio and error of every codec and operator."""
