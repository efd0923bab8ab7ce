"""One launch: gradients into batches, through a codec, over the network, and back."""
