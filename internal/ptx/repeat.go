package ptx

import (
	"encoding/binary"
	"errors"
)

// Texts of one source are mostly alike, but gzip looks no further back than 32 KiB,
// which is less than one of them. So what repeats is taken out before.

const (
	repeatBytes = 32 // the fewest that are taken for a repeat
	resumeBytes = 8  // the same, where a repeat goes on behind something else
)

// split takes all apart into its repeats and what is fresh. A repeat is three numbers:
// how many fresh bytes come before it, how many it repeats, and how much further back
// these lie than those of the repeat before.
func split(all []byte) (repeats, fresh []byte) {
	last := newTable()
	distance, begin := 0, 0 // of the repeat before, and where what is fresh begins
	for i := 0; i < len(all); {
		from, n := i-distance, 0
		if distance > 0 {
			n = alike(all, from, i)
		}
		if j, ok := last.find(all, i); ok && n < repeatBytes {
			if m := alike(all, j, i); m > n+resumeBytes && m >= repeatBytes {
				from, n = j, m
			}
		}
		if n < resumeBytes {
			last.add(all, i)
			i++
			continue
		}
		repeats = binary.AppendUvarint(repeats, uint64(i-begin))
		repeats = binary.AppendUvarint(repeats, uint64(n))
		repeats = binary.AppendVarint(repeats, int64(i-from-distance))
		fresh = append(fresh, all[begin:i]...)
		distance = i - from
		for end := i + n; i < end; i++ {
			last.add(all, i)
		}
		begin = i
	}
	return repeats, append(fresh, all[begin:]...)
}

var errRepeat = errors.New("what its texts are said to repeat is not there")

// join returns the first n bytes of what split has taken apart.
func join(repeats, fresh []byte, n int) ([]byte, error) {
	all := make([]byte, 0, n)
	distance := 0
	for len(repeats) > 0 && len(all) < n {
		before, a := binary.Uvarint(repeats)
		length, b := binary.Uvarint(repeats[max(a, 0):])
		further, c := binary.Varint(repeats[max(a, 0)+max(b, 0):])
		if min(a, b, c) <= 0 || before > uint64(len(fresh)) || length > mostBytes {
			return nil, errRepeat
		}
		repeats = repeats[a+b+c:]
		all = append(all, fresh[:before]...)
		fresh = fresh[before:]
		if distance += int(further); distance <= 0 || distance > len(all) {
			return nil, errRepeat
		}
		for left := min(int(length), n-len(all)); left > 0; {
			part := min(left, distance)
			all = append(all, all[len(all)-distance:][:part]...)
			left -= part
		}
	}
	if missing := n - len(all); missing > len(fresh) {
		return nil, errRepeat
	} else if missing > 0 {
		all = append(all, fresh[:missing]...)
	}
	return all[:n], nil
}

// alike returns how many bytes from j on are those from i on.
func alike(all []byte, j, i int) (n int) {
	for i+n < len(all) && all[j+n] == all[i+n] {
		n++
	}
	return n
}

// A table has where bytes that begin with a repeatBytes of some hash were last.
type table []int32

const tableBits = 22

func newTable() table { return make(table, 1<<tableBits) }

// at returns the place in the table of what begins at i.
func (t table) at(all []byte, i int) (*int32, bool) {
	if i+repeatBytes > len(all) {
		return nil, false
	}
	h := uint64(0)
	for k := i; k < i+repeatBytes; k += 8 {
		h = (h>>29 ^ h ^ binary.LittleEndian.Uint64(all[k:])) * 0x9e3779b97f4a7c15
	}
	return &t[h>>(64-tableBits)], true
}

func (t table) add(all []byte, i int) {
	if p, ok := t.at(all, i); ok {
		*p = int32(i) + 1
	}
}

// find returns where to look for what begins at i.
func (t table) find(all []byte, i int) (j int, ok bool) {
	p, ok := t.at(all, i)
	if !ok || *p == 0 {
		return 0, false
	}
	return int(*p) - 1, true
}
