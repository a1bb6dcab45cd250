"""`python -m nybble.demo` (make demo): the whole path on a real language model, in minutes on two CPU cores."""
