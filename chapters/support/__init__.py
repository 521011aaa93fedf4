"""The code that chapters import: on top what several use, in chNN/ what chapter NN alone draws, runs and plants."""
