"""Hidden states that a step keeps in one array, and the program that has them apart."""
