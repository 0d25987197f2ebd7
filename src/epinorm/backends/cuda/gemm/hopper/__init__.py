"""By wgmma and TMA (sm_90)."""
