//! What the connection layer promises, on real servers and through a proxy that breaks things.
