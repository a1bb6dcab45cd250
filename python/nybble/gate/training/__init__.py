"""What the gates that train share: a generated Llama store, the same model streamed and resident, and timed steps."""
