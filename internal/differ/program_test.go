package differ

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
)

// A Program is a list of operations that one goroutine carries out in order. The
// objects that it uses have numbers: an operation with R makes object R, and
// others name it.
type Program struct {
	Seed  uint64 `json:"seed"`  // of the run that drew it
	Index int    `json:"index"` // in that run
	// Fatal programs end with an error that the device does not recover from.
	Fatal bool `json:"fatal,omitempty"`
	Ops   []Op `json:"ops"`
}

// An Op is one operation. What its fields mean depends on the kind; a field that
// is not used is 0.
type Op struct {
	K    string `json:"k"`              // the kind
	R    int    `json:"r,omitempty"`    // the object that it makes
	S    int    `json:"s,omitempty"`    // a stream
	O    int    `json:"o,omitempty"`    // another object
	X    Ref    `json:"x,omitzero"`     // memory: the destination
	Y    Ref    `json:"y,omitzero"`     // memory: the source
	N    int    `json:"n,omitempty"`    // a length
	A    int64  `json:"a,omitempty"`    // numbers
	B    int64  `json:"b,omitempty"`    //
	V    []int  `json:"v,omitempty"`    // a list of objects
	T    int    `json:"t,omitempty"`    // 1: on another OS thread
	Do   []Op   `json:"do,omitempty"`   // what a function that is an argument does
	Fail bool   `json:"fail,omitempty"` // that function returns an error at its end

	at int // the number of the operation in the program, bodies included
}

// A Ref is a part of an object with memory, in bytes.
type Ref struct {
	O  int `json:"o"`
	Lo int `json:"lo,omitempty"`
	Hi int `json:"hi"`
}

func (r Ref) len() int { return r.Hi - r.Lo }

// number gives each operation its number and returns how many there are.
func (p *Program) number() int { return number(p.Ops, 0) }

func number(ops []Op, at int) int {
	for i := range ops {
		ops[i].at = at
		at = number(ops[i].Do, at+1)
	}
	return at
}

// each calls fn for all operations, sorted by number.
func each(ops []Op, fn func(*Op)) {
	for i := range ops {
		fn(&ops[i])
		each(ops[i].Do, fn)
	}
}

// clone returns a program that shares nothing with p.
func (p *Program) clone() *Program {
	c := *p
	c.Ops = cloneOps(p.Ops)
	return &c
}

func cloneOps(ops []Op) []Op {
	c := make([]Op, len(ops))
	for i, op := range ops {
		c[i] = op
		c[i].V = append([]int(nil), op.V...)
		c[i].Do = cloneOps(op.Do)
	}
	return c
}

func (p *Program) String() string {
	text, err := json.Marshal(p)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// source returns the random numbers of a program, which depend on the seed and
// the index alone.
func source(seed uint64, index int) *rand.Rand {
	return rand.New(rand.NewPCG(seed, uint64(index)))
}

func (op *Op) String() string {
	text, err := json.Marshal(op)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d: %s", op.at, text)
}
