package safetensors

import "hash/maphash"

// A table finds tensors by their names. It has their numbers only, which for many
// tensors is a fraction of what a map takes; its seed is new for each, so that no
// file can bring about collisions.
type table struct {
	seed  maphash.Seed
	slots []uint32 // the tensor's number + 1, by the hash of its name; 0 is free
}

// index enters all tensors. When a name occurs twice it returns the number of the
// second tensor that has it.
func (t *table) index(tensors []Tensor) (twice int, ok bool) {
	n := 1
	for n < len(tensors)+len(tensors)/2 {
		n *= 2
	}
	t.seed, t.slots = maphash.MakeSeed(), make([]uint32, n+1)
	for i := range tensors {
		slot := t.slot(tensors, tensors[i].Name)
		if t.slots[slot] != 0 {
			return i, false
		}
		t.slots[slot] = uint32(i + 1)
	}
	return 0, true
}

func (t *table) find(tensors []Tensor, name string) (int, bool) {
	if len(t.slots) == 0 {
		return 0, false
	}
	i := t.slots[t.slot(tensors, name)]
	return int(i) - 1, i != 0
}

// slot returns where the name is, or the free slot where it would be. There is
// always a free one.
func (t *table) slot(tensors []Tensor, name string) int {
	slot := int(maphash.String(t.seed, name) % uint64(len(t.slots)))
	for t.slots[slot] != 0 && tensors[t.slots[slot]-1].Name != name {
		if slot++; slot == len(t.slots) {
			slot = 0
		}
	}
	return slot
}
