package doctor

import (
	"io/fs"
	"testing"
)

func TestClockSync(t *testing.T) {
	try(t, clockSync,
		change{"free", func(w *world) { w.ClockStatus = func() (bool, error) { return false, nil } }, Warn, "chronyd"},
		change{"refused", func(w *world) { w.ClockStatus = func() (bool, error) { return false, fs.ErrPermission } }, Unknown, "permission"},
	)
}
