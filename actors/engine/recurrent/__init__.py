"""Layers with a recurrent state, such as Mamba, gated delta nets and short convolutions: their states by sequence."""
