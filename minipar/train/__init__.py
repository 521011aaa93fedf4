"""Training: configuration, data, the trainer, and the proof that many ranks equal one device."""
