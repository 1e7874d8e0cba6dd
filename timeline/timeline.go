package timeline

import "github.com/gochorus/chorus/internal/timeline"

// A Recording is a recording in progress.
type Recording struct{ r *timeline.Recorder }

// Start starts recording to a new file in the directory, which it creates if necessary. A process
// has at most one recording at a time.
func Start(dir string) (*Recording, error) {
	r, err := timeline.Start(dir)
	if err != nil {
		return nil, err
	}
	return &Recording{r}, nil
}

// Close stops the recording and writes the rest of the file. Operations that are in flight are
// recorded if they complete within five seconds. It returns the error of the writes. If a device
// or the disk hangs, it returns an error after fifteen seconds. It is idempotent and does nothing
// on nil.
func (r *Recording) Close() error {
	if r == nil || r.r == nil {
		return nil
	}
	return r.r.Close()
}
