"""Turns the bitsandbytes modules of a model into nybble's multiply, and back."""
