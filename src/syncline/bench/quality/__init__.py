"""`bench quality`: loss and accuracy with each codec and with `auto` beside dense training, on several tasks."""
