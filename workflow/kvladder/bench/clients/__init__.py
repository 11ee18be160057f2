"""Load clients under test, one module each: how to run it on prepared prompts, and how to read what it reports."""
