"""The only definition of configuration and result files."""
