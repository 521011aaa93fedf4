"""What chapter 14 runs and draws: eighteen layouts of one model, and runs of which five are broken."""
