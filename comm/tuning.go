package comm

import (
	"context"

	"github.com/gochorus/chorus/internal/route"
)

// A Tuning is a table of the fastest strategies of each collective, measured on one kind
// of devices. An empty Tuning is valid for all devices; NCCL then runs everything.
type Tuning struct {
	For     Site     `json:"for"`
	Choices []Choice `json:"choices"`
}

// A Site is the set of conditions that the times of a Tuning depend on.
type Site struct {
	GPU     string `json:"gpu"`
	Ranks   int    `json:"ranks"`
	Hosts   int    `json:"hosts"` // of the ranks
	Locals  int    `json:"ranks_of_process"`
	Backend string `json:"backend"`
	Driver  string `json:"driver"` // its CUDA version
	NCCL    string `json:"nccl"`
	Kernels string `json:"kernels"` // version of the Chorus kernels
}

// A Choice is the measurement of one operation and size. An operation that was not
// measured uses the most similar Choice. The criteria are, in this order:
//   - the same kind
//   - both or neither are sums of floats of at most 32 bits
//   - the same type and reduction
//   - both or neither are a multiple of 16 bytes
//   - the nearest logarithm of the size
type Choice struct {
	Operation string   `json:"operation"`       // such as "all-reduce"
	Type      string   `json:"type,omitempty"`  // of reductions, such as "float32"
	Reduction string   `json:"redop,omitempty"` // of reductions
	Bytes     int      `json:"bytes"`           // all of an all-reduce or a broadcast, one rank's part of the others
	Times     []Timing `json:"times"`           // the fastest first
}

// A Timing is the duration of an operation with a strategy.
type Timing struct {
	Strategy Strategy `json:"strategy"`
	Micros   float64  `json:"us"` // per operation, on the slowest rank, in a graph of several operations
	// Eager is the duration without a graph, for copy engines only: without a graph the
	// devices wait longer for each other. It applies to operations that are not captured.
	// Other strategies do not need it, because only copy engines use one call, and one
	// graph, for all ranks.
	Eager float64 `json:"eager_us,omitempty"`
}

// TuningFile returns the path of the file that groups use: CHORUS_TUNING_FILE, or
// chorus/tuning.json in the user's cache directory.
func TuningFile() (string, error) { return route.TuningFile() }

// LoadTuning returns the Tuning for a site from a file, and nil if the file has none for
// the same GPUs and numbers of ranks and processes. It returns an error if the file is
// invalid, or if its Tuning was measured under other conditions, such as another version.
func LoadTuning(path string, at Site) (*Tuning, error) {
	t, err := route.LoadTuning(path, route.Site(at))
	return tuningOf(t), err
}

// Save writes the Tuning to a file and keeps the Tunings for other sites in it. It
// replaces the file atomically. Several processes may call it at the same time: each waits
// for the lock on the file's directory until ctx ends, but at most ten seconds.
func (t *Tuning) Save(ctx context.Context, path string) error {
	if t == nil || path == "" {
		return badArgument("write the tuning", "no tuning or no path given")
	}
	x, err := t.routeTuning()
	if err != nil {
		return err
	}
	return x.Save(ctx, path)
}

// routeTuning returns a copy of the Tuning for package route. nil means an empty Tuning.
func (t *Tuning) routeTuning() (*route.Tuning, error) {
	if t == nil {
		return &route.Tuning{}, nil
	}
	x := &route.Tuning{For: route.Site(t.For)}
	for _, c := range t.Choices {
		choice := route.Choice{Operation: c.Operation, Type: c.Type, Reduction: c.Reduction, Bytes: c.Bytes}
		for _, one := range c.Times {
			s, err := one.Strategy.route()
			if err != nil {
				return nil, err
			}
			choice.Times = append(choice.Times, route.Timing{Strategy: s, Micros: one.Micros, Eager: one.Eager})
		}
		x.Choices = append(x.Choices, choice)
	}
	return x, nil
}

// tuningOf is the inverse of routeTuning.
func tuningOf(x *route.Tuning) *Tuning {
	if x == nil {
		return nil
	}
	return &Tuning{For: Site(x.For), Choices: choicesOf(x.Choices)}
}

func choicesOf(list []route.Choice) (choices []Choice) {
	for _, x := range list {
		c := Choice{Operation: x.Operation, Type: x.Type, Reduction: x.Reduction, Bytes: x.Bytes}
		for _, one := range x.Times {
			c.Times = append(c.Times, Timing{Strategy: strategyOf(one.Strategy), Micros: one.Micros, Eager: one.Eager})
		}
		choices = append(choices, c)
	}
	return choices
}
