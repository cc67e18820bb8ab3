"""Checkpoints: all of `State`, saved while training continues, and read back on any number of ranks.

    checkpoints/round-12/slice-0-of-2.safetensors    a rank's slice of the model, the moments, the shared vectors; what
                                                     it has not sent yet (--wire bf16)
    checkpoints/round-12/part-0.json                 that rank's files, each with its SHA-256
    checkpoints/round-12/manifest.json               the parts with their SHA-256; round, configuration, fingerprints
    checkpoints/clients/round-9-0-of-2-....safetensors   client memories by client id, written when they have changed

`format` has these files and their records, `save` writes them, `load` finds and reads the newest sound checkpoint.
"""
