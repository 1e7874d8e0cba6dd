package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/internal/plain"
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
			state = "not complete: " + plain.Text(r.Reason)
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
		fmt.Fprintf(&b, "%-8s %-20s %10s  %s\n", t.DType, shapeText(t.Shape), gigabytes(t.Bytes), plain.Text(t.Name))
	}
	fmt.Fprintf(&b, "%d tensors, %s\n", len(r.Tensors), gigabytes(r.Bytes))
	_, err := io.WriteString(out, b.String())
	return err
}

func shapeText(shape []int) string { return strings.ReplaceAll(fmt.Sprint(shape), " ", ",") }
