package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/internal/safefile"
	"github.com/gochorus/chorus/internal/torchfile"
)

// A section is the place of an archive of torch.save in a file.
type section struct{ offset, length int64 }

// checkSums compares the bytes of a checkpoint's files of torch with the CRC-32 in them. It counts
// the files that have none.
func checkSums(ctx context.Context, path string, c *checkpoint.Checkpoint) (sums torchfile.Sums, others int, err error) {
	archives, err := archivesOf(path, c)
	for _, file := range slices.Sorted(maps.Keys(archives)) {
		if err != nil {
			break
		}
		var s torchfile.Sums
		s, err = checkFile(ctx, file, archives[file])
		sums.Checked, sums.Without = sums.Checked+s.Checked, sums.Without+s.Without
		if s == (torchfile.Sums{}) {
			others++
		}
	}
	return sums, others, err
}

// archivesOf returns the archives in each file of a checkpoint. A file without a list is one
// archive, or not of torch.
func archivesOf(path string, c *checkpoint.Checkpoint) (map[string][]section, error) {
	archives := map[string][]section{}
	for _, s := range c.Status() {
		archives[s.Path] = nil
	}
	meta := filepath.Join(path, torchfile.MetadataName)
	if _, err := os.Lstat(meta); err != nil {
		return archives, nil
	}
	text, err := safefile.Read(meta, torchfile.MostMetadata)
	if err != nil {
		return nil, err
	}
	m, err := torchfile.ReadMetadata(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", meta, err)
	}
	for i := range m.Tensors {
		for _, k := range m.Tensors[i].Chunks {
			file := filepath.Join(path, k.File)
			archives[file] = append(archives[file], section{k.Offset, k.Length})
		}
	}
	return archives, nil
}

// checkFile checks the archives in a file.
func checkFile(ctx context.Context, path string, archives []section) (sums torchfile.Sums, err error) {
	f, err := safefile.Open(path)
	if err != nil {
		return sums, err
	}
	defer f.Close()
	if len(archives) == 0 {
		info, err := f.Stat()
		if err != nil {
			return sums, err
		}
		start, err := torchfile.Start(f, info.Size())
		if err != nil || !torchfile.Is(start) {
			return sums, err
		}
		archives = []section{{0, info.Size()}}
	}
	for _, a := range archives {
		s, err := torchfile.CheckSums(ctx, io.NewSectionReader(f, a.offset, a.length), a.length)
		if err != nil {
			return sums, fmt.Errorf("verify %s: at byte %d: %w", path, a.offset, err)
		}
		sums.Checked, sums.Without = sums.Checked+s.Checked, sums.Without+s.Without
	}
	return sums, nil
}
