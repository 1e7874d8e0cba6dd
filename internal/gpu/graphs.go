package gpu

import (
	"fmt"
	"slices"
	"sync"
)

// Graphs are the graphs that have captured the work of an object. The memory of the object must stay until they are closed, because
// each launch uses it.
type Graphs struct {
	mu   sync.Mutex
	list []Holder
}

// Add records that work on s uses the object: if s is being captured, its graph holds the object until it is closed.
func (g *Graphs) Add(s *Stream) error {
	if !s.Open() { // the work itself reports it
		return nil
	}
	return s.Captured(g)
}

// Hold adds a graph.
func (g *Graphs) Hold(h Holder) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.list = append(g.list, h)
}

// LetGo undoes Hold.
func (g *Graphs) LetGo(h Holder) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := slices.Index(g.list, h); i >= 0 {
		g.list = slices.Delete(g.list, i, i+1)
	}
}

// Any reports whether a graph exists.
func (g *Graphs) Any() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.list) > 0
}

// Refuse returns an error if a graph exists. op is what would free the memory.
func (g *Graphs) Refuse(op string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.list) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s uses it: close the graph first", op, g.list[0])
}
