"""What a program says of a model: positions, groups, cuts, lanes, routes, and losses."""
