"""What the chapters import: on top what several use, in chNN/ what chapter NN alone draws, counts, runs and plants."""
