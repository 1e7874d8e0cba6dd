package graph

// Exec returns the graph. It belongs to the Callable.
func (c *Callable[T]) Exec() *Exec { return c.exec }

// Held returns the number of objects that a graph holds.
func Held(x *Exec) int { return len(x.held) }
