package main

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path"
	"slices"
	"time"
)

// An entry is a file of an archive.
type entry struct {
	name string // in the archive
	from string
	mode int64
}

// writeArchive writes files into a folder of a tar archive. Only their bytes and when decide its bytes.
func writeArchive(to, folder string, list []entry, when time.Time) (err error) {
	f, err := create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	z, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	if err != nil {
		return err
	}
	w := tar.NewWriter(z)
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b entry) int { return cmp.Compare(a.name, b.name) })
	for _, e := range list {
		if err := addFile(w, path.Join(folder, e.name), e, when); err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), z.Close())
}

func addFile(w *tar.Writer, name string, e entry, when time.Time) error {
	f, err := os.Open(e.from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: info.Size(), Mode: e.mode, ModTime: when, Format: tar.FormatPAX}
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return err
}
