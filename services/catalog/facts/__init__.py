"""The facts themselves: keys, values and the rules by which each kind of fact changes. No gRPC servicer here."""
