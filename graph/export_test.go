package graph

// Exec returns the graph. It belongs to the Callable.
func (c *Callable[T]) Exec() *Exec { return c.exec }
