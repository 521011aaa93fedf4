"""What the chapters import: show.py prints, figures_*.py draw, the others count, watch and patch for one chapter."""
