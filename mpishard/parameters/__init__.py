"""Parameters as named views into one flat buffer, their gradients in buckets, and their shares under ZeRO-3."""
