"""What figures share: their look and how they become files (`style`), lanes of setups (`lanes`), panels of lines
(`lines`)."""
