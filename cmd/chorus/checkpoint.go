package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/internal/torchfile"
)

const checkpointLong = `List, verify, compare and convert checkpoints on the host. No GPU is needed.

A checkpoint is one of:
  a step of a training: a folder such as step-00000100, which has a manifest with digests
  a safetensors file, or an index of several (model.safetensors.index.json)
  a file of torch.save (.pt, .pth, .bin), of PyTorch 1.6 or later
  a folder of torch.distributed.checkpoint, which has a file .metadata
  a folder that has one of the indexes or one safetensors file

Files of torch are read without running code. Reading a class other than tensors,
dictionaries, lists and plain values is an error that names the class.

The commands use at most 256 MiB of memory for the elements of tensors, whatever their
size. The exit code is 0 if the command succeeded, 1 if not, and 64 for a mistake in the
command line.`

func newCheckpointCommand() *cobra.Command {
	c := parentCommand("checkpoint", "List, verify, compare and convert checkpoints")
	c.Long = checkpointLong
	c.AddCommand(newListCommand(), newVerifyCommand(), newDiffCommand(), newReshardCommand(), newExportCommand())
	return c
}

// paths accepts a number of arguments between least and most.
func paths(least, most int, what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return usageError(c, fmt.Errorf("%d arguments: want %s", len(args), what))
		}
		return nil
	}
}

// sizeOf parses a number of bytes with an optional unit: kB or KB, MB, GB or TB, of powers of 1000, or
// KiB, MiB, GiB, TiB, of powers of 1024.
func sizeOf(text string) (int64, error) {
	digits := strings.TrimRight(text, "kKMGTiB")
	n, err := strconv.ParseInt(digits, 10, 64)
	unit, ok := map[string]int64{"": 1, "B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[text[len(digits):]]
	if err != nil || !ok || n < 1 || n > (1<<62)/unit {
		return 0, fmt.Errorf("%q: want a size such as 5GB or 512MiB", text)
	}
	return n * unit, nil
}

const listLong = `List the steps in a folder of a training, or the tensors of a checkpoint.

For a folder with steps the command lists each step with its size, its number of files, the
number of ranks that saved it, and whether it is complete. A step is complete if its manifest
and all its files are there and have the right sizes. The command does not read the bytes of
tensors, so a complete step may be damaged: only chorus checkpoint verify compares the digests.
Steps are folders. The command ignores symbolic links to folders.`

// A stepReport is a step of a training.
type stepReport struct {
	Folder   string `json:"folder"`
	Step     int64  `json:"step"`
	Bytes    int64  `json:"bytes"`
	Files    int    `json:"files"`
	Ranks    int    `json:"ranks"`
	Tensors  int    `json:"tensors"`
	Complete bool   `json:"complete"`
	Reason   string `json:"reason,omitempty"` // why it is not complete
}

// A tensorReport is a tensor of a checkpoint.
type tensorReport struct {
	Name  string `json:"name"`
	DType string `json:"dtype"`
	Shape []int  `json:"shape"`
	Bytes int64  `json:"bytes"`
	File  string `json:"file"`
}

type checkpointReport struct {
	Path     string            `json:"path"`
	Bytes    int64             `json:"bytes"`
	Tensors  []tensorReport    `json:"tensors"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

func newListCommand() *cobra.Command {
	var step int64
	var asJSON bool
	c := &cobra.Command{
		Use:     "ls [flags] path",
		Short:   "List the steps of a training, or the tensors of a checkpoint",
		Long:    listLong,
		Example: "  chorus checkpoint ls runs/7\n  chorus checkpoint ls runs/7 --step 1000\n  chorus checkpoint ls pytorch_model.bin --json",
		Args:    paths(1, 1, "one path"),
		RunE: func(c *cobra.Command, args []string) error {
			if step < -1 {
				return usageError(c, fmt.Errorf("--step %d: want 0 or more", step))
			}
			return interruptible(c, func(_ context.Context, out io.Writer) error { return list(out, args[0], step, asJSON) })
		},
	}
	c.Flags().SortFlags = false
	c.Flags().Int64Var(&step, "step", -1, "step of the training whose tensors are listed")
	c.Flags().BoolVar(&asJSON, "json", false, "list in JSON")
	return c
}

func list(out io.Writer, path string, step int64, asJSON bool) error {
	steps, err := stepsOf(path)
	if err != nil {
		return err
	}
	if step >= 0 {
		i := slices.IndexFunc(steps, func(folder string) bool { return stepNumber(folder) == step })
		if i < 0 {
			return fmt.Errorf("ls %s: there is no step %d", path, step)
		}
		path = steps[i]
	} else if len(steps) > 0 {
		return listSteps(out, steps, asJSON)
	}
	c, err := checkpoint.Open([]string{path}, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	r := checkpointReport{Path: path, Bytes: c.Bytes(), Metadata: c.Metadata(), Tensors: []tensorReport{}}
	for _, t := range c.Infos() {
		r.Tensors = append(r.Tensors, tensorReport{t.Name, t.Format.String(), append([]int{}, t.Shape...), t.Bytes(), t.File})
	}
	if asJSON {
		return encode(out, &r)
	}
	return r.write(out)
}

// stepsOf returns the folders of the steps in a folder, or none if it is not a folder of a
// training.
func stepsOf(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil || !info.IsDir() {
		return nil, err
	}
	return checkpoint.List(path)
}

// stepNumber returns the step of a folder such as step-00000100.
func stepNumber(folder string) int64 {
	_, digits, _ := strings.Cut(filepath.Base(folder), "step-")
	digits, _, _ = strings.Cut(digits, "-")  // the checkpoint was being replaced
	n, _ := strconv.ParseInt(digits, 10, 64) // List returns only such folders
	return n
}

func listSteps(out io.Writer, folders []string, asJSON bool) error {
	reports := []stepReport{}
	for _, folder := range folders {
		reports = append(reports, reportStep(folder))
	}
	if asJSON {
		return encode(out, reports)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%12s %10s %6s %6s %8s  %s\n", "step", "size", "files", "ranks", "tensors", "state")
	for _, r := range reports {
		state := "complete"
		if !r.Complete {
			state = "not complete: " + safe.Text(r.Reason)
		}
		fmt.Fprintf(&b, "%12d %10s %6d %6d %8d  %s\n", r.Step, gigabytes(r.Bytes), r.Files, r.Ranks, r.Tensors, state)
	}
	b.WriteString("bytes not checked: chorus checkpoint verify compares them with the digests\n")
	_, err := io.WriteString(out, b.String())
	return err
}

func reportStep(folder string) stepReport {
	r := stepReport{Folder: folder, Step: stepNumber(folder)}
	s, err := checkpoint.OpenSaved(folder)
	if err != nil {
		r.Reason = err.Error()
		return r
	}
	r.Complete, r.Bytes, r.Files, r.Ranks, r.Tensors = true, s.Bytes(), s.Files(), s.Ranks(), len(s.Tensors())
	if err := s.Close(); err != nil {
		r.Complete, r.Reason = false, err.Error()
	}
	return r
}

func (r *checkpointReport) write(out io.Writer) error {
	var b strings.Builder
	for _, t := range r.Tensors {
		fmt.Fprintf(&b, "%-8s %-20s %10s  %s\n", t.DType, shapeText(t.Shape), gigabytes(t.Bytes), safe.Text(t.Name))
	}
	fmt.Fprintf(&b, "%d tensors, %s\n", len(r.Tensors), gigabytes(r.Bytes))
	_, err := io.WriteString(out, b.String())
	return err
}

func shapeText(shape []int) string { return strings.ReplaceAll(fmt.Sprint(shape), " ", ",") }

// A section is the place of an archive of torch.save in a file.
type section struct{ offset, length int64 }

// checkSums compares the bytes of a checkpoint's files of torch with the CRC-32
// in them, and counts the files that have none.
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
	text, err := safe.Read(meta, torchfile.MostMetadata)
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
	f, err := safe.Open(path)
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

const diffLong = `Compare two checkpoints: the names, types and shapes of tensors, and their elements.

For each tensor that differs the command prints how many elements differ, the indices of the
first one, and the largest absolute difference. The formats of the two checkpoints may differ.
The exit code is 0 if the tensors are equal in every bit, and 1 if not.`

// A diffReport is a difference of two checkpoints.
type diffReport struct {
	Name     string   `json:"name"`
	Kind     string   `json:"kind"` // only_first, only_second, type, shape or elements
	First    string   `json:"first,omitempty"`
	Second   string   `json:"second,omitempty"`
	Elements int64    `json:"elements,omitempty"`
	Index    []int    `json:"index,omitempty"`   // of the first element that differs
	MaxAbs   *float64 `json:"max_abs,omitempty"` // null if it is not a number, or infinite
}

func newDiffCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:     "diff [flags] first second",
		Short:   "Compare two checkpoints",
		Long:    diffLong,
		Example: "  chorus checkpoint diff runs/7/step-00001000 runs/8/step-00001000\n  chorus checkpoint diff model.safetensors pytorch_model.bin --json",
		Args:    paths(2, 2, "two checkpoints"),
		RunE: func(c *cobra.Command, args []string) error {
			return interruptible(c, func(ctx context.Context, out io.Writer) error { return diff(ctx, out, args[0], args[1], asJSON) })
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "differences in JSON")
	return c
}

func diff(ctx context.Context, out io.Writer, first, second string, asJSON bool) error {
	a, err := checkpoint.Open([]string{first}, nil)
	if err != nil {
		return err
	}
	defer a.Close()
	b, err := checkpoint.Open([]string{second}, nil)
	if err != nil {
		return err
	}
	defer b.Close()
	list, err := checkpoint.Compare(ctx, a, b)
	switch {
	case err != nil && ctx.Err() != nil:
		return errors.New("diff: interrupted")
	case err != nil:
		return err
	}
	reports := []diffReport{}
	for i := range list {
		reports = append(reports, diffReportOf(&list[i]))
	}
	if asJSON {
		err = encode(out, reports)
	} else {
		err = writeDiff(out, list, len(a.Infos()))
	}
	if err == nil && len(list) > 0 {
		return errDifferent
	}
	return err
}

func diffReportOf(d *checkpoint.Difference) diffReport {
	r := diffReport{Name: d.Name, First: infoText(d.A), Second: infoText(d.B), Elements: d.Elements, Index: d.First}
	switch {
	case d.A == nil:
		r.Kind = "only_second"
	case d.B == nil:
		r.Kind = "only_first"
	case d.A.Format != d.B.Format:
		r.Kind = "type"
	case !slices.Equal(d.A.Shape, d.B.Shape):
		r.Kind = "shape"
	default:
		r.Kind = "elements"
		if !math.IsNaN(d.MaxAbs) && !math.IsInf(d.MaxAbs, 0) {
			r.MaxAbs = &d.MaxAbs
		}
	}
	return r
}

func infoText(t *checkpoint.Info) string {
	if t == nil {
		return ""
	}
	return t.Format.String() + " " + shapeText(t.Shape)
}

func writeDiff(out io.Writer, list []checkpoint.Difference, tensors int) error {
	var b strings.Builder
	for i := range list {
		fmt.Fprintln(&b, safe.Text(list[i].String()))
	}
	if len(list) == 0 {
		fmt.Fprintf(&b, "%d tensors, no difference\n", tensors)
	} else {
		fmt.Fprintf(&b, "%d tensors differ\n", len(list))
	}
	_, err := io.WriteString(out, b.String())
	return err
}
