package main

import (
	"fmt"

	"github.com/gochorus/chorus/cmd/chorus/internal/doctor"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/memory"
)

// pinned pins memory for the first GPU of this process and frees it.
func (m *member) pinned() doctor.Speed {
	most, err := env.GDSPinned.Int()
	if err != nil {
		return doctor.Speed{Missing: err.Error()}
	}
	for _, n := range []int{64 << 20, most} {
		x, err := memory.MakePinned[byte](m.devs[0], n)
		if err != nil {
			return doctor.Speed{Reason: fmt.Sprintf("%d MiB cannot be pinned: %v", n>>20, err)}
		}
		if err := x.Close(); err != nil {
			return doctor.Speed{Missing: err.Error()}
		}
	}
	return doctor.Speed{OK: true, Reason: fmt.Sprintf("64 MiB and %d MiB were pinned", most>>20)}
}
