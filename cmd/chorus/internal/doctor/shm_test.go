package doctor

import (
	"io/fs"
	"testing"
)

func TestShm(t *testing.T) {
	try(t, shm,
		change{"Docker's default", func(w *world) { w.space = Space{64 << 20, 64 << 20} }, Fail, "--shm-size=1g"},
		change{"one rank", func(w *world) { w.space = Space{64 << 20, 64 << 20}; w.Ranks = 1 }, Warn, "64 MiB"},
		change{"small", func(w *world) { w.space = Space{512 << 20, 512 << 20} }, Warn, "512 MiB"},
		change{"full", func(w *world) { w.space.Free = 1 << 20 }, Warn, "1 MiB free"},
		change{"no folder", func(w *world) { w.SpaceOf = func(string) (*Space, error) { return nil, fs.ErrNotExist } }, Unknown, "not exist"},
	)
}
