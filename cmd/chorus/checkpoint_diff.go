package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/internal/plain"
)

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
			return interruptibleJSON(c, asJSON, func(ctx context.Context, out io.Writer) error { return diff(ctx, out, args[0], args[1], asJSON) })
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
		fmt.Fprintln(&b, plain.Text(list[i].String()))
	}
	if len(list) == 0 {
		fmt.Fprintf(&b, "%d tensors, no difference\n", tensors)
	} else {
		fmt.Fprintf(&b, "%d tensors differ\n", len(list))
	}
	_, err := io.WriteString(out, b.String())
	return err
}
