"""PowerSGD arithmetic: factor shapes, error feedback and orthogonalisation."""
