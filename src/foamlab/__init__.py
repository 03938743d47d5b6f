"""foamlab: the lab around torchfoam. Train, fine-tune, compare, plan and report from one command line."""
