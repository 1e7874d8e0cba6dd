package race

import "fmt"

// A Conflict is two uses of the same bytes without an order. At least one use writes.
type Conflict struct {
	By     Access // the later call
	Other  Access
	Write  bool   // By writes
	Lo, Hi uint64 // the bytes of the block that By uses
	Block  fmt.Stringer
}

// String describes both uses and the cure.
func (c *Conflict) String() string {
	cure := "the two streams are not ordered: record an event after the first use and make the other stream wait for it"
	if c.By.Stream == Host || c.Other.Stream == Host {
		cure = "the host and the stream are not ordered: let the host wait for the stream first"
	}
	return fmt.Sprintf("race: %s %s bytes %d to %d of %v, which %v also uses, and %s", c.By, Verb(c.Write), c.Lo, c.Hi, c.Block, c.Other, cure)
}

// Verb returns "reads" or "writes".
func Verb(write bool) string {
	if write {
		return "writes"
	}
	return "reads"
}
