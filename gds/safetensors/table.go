package safetensors

import "hash/maphash"

// A table finds tensors by name. It stores only their indices, which takes a
// fraction of the memory of a map. Each table has a random seed, so that a file
// cannot cause collisions.
type table struct {
	seed  maphash.Seed
	slots []uint32 // index of the tensor + 1, by the hash of its name; 0 if free
}

// index adds all tensors. If a name is duplicate, it returns the index of the
// second tensor with this name.
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

// slot returns the slot of the name, or the free slot for it. There is always a
// free slot.
func (t *table) slot(tensors []Tensor, name string) int {
	slot := int(maphash.String(t.seed, name) % uint64(len(t.slots)))
	for t.slots[slot] != 0 && tensors[t.slots[slot]-1].Name != name {
		if slot++; slot == len(t.slots) {
			slot = 0
		}
	}
	return slot
}
