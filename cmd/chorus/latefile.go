package main

import (
	"io"
	"os"

	"github.com/gochorus/chorus/internal/safefile"
)

// A lateFile keeps what the file has had until something else is written: a measurement
// that ends early leaves the results of the last one.
type lateFile struct {
	file  *os.File
	begun bool
}

// createLate opens a file, and makes it if there is none.
func createLate(name string) (io.WriteCloser, error) {
	file, err := safefile.Keep(name)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	// The process's own output has nothing to keep.
	return &lateFile{file, !info.Mode().IsRegular()}, nil
}

func (f *lateFile) Write(p []byte) (int, error) {
	if !f.begun {
		if err := f.file.Truncate(0); err != nil {
			return 0, err
		}
		f.begun = true
	}
	return f.file.Write(p)
}

func (f *lateFile) Close() error { return f.file.Close() }
