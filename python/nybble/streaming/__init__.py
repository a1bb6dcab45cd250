"""Layer streaming: nybble.stream for transformers models, SlotPool for a trainer's own buffers."""
