package main

import (
	"io"
	"os"

	"github.com/gochorus/chorus/internal/safefile"
)

// A lateFile keeps its old content until the first write, so a measurement that
// fails early does not erase earlier results.
type lateFile struct {
	file  *os.File
	begun bool
}

// createLate opens a file and creates it if it does not exist.
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
	// Only regular files have old content: a pipe or a terminal cannot be truncated.
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
