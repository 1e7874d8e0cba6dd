package route_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
)

// All ranks judge the same values and failures, and a rank that closes its group at once does not take them from the others.
func TestAgree(t *testing.T) {
	for range 20 {
		gs, errs := groups.Join(t, t.Context(), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}))
		require.NoError(t, errors.Join(errs...))
		said := make([][]collective.Said[string], len(gs))
		groups.Each(t, gs, func(i int, g *comm.Group) error {
			failed := []error{nil}
			if i == 1 {
				failed[0] = errors.Join(errors.New("no\x1b"), errors.New("memory"))
			}
			errs[i] = route.Agree(testgpu.Context(t), g, "test", []string{fmt.Sprintf("value\n%d", i)}, failed, func(all []collective.Said[string]) error {
				said[i] = all
				return errors.New(all[1].Failed)
			})
			return g.Close()
		})
		for rank, err := range errs {
			require.EqualError(t, err, `no\x1b; memory`, rank)
			require.Equal(t, said[0], said[rank])
		}
		require.Equal(t, "value\n2", said[0][2].Value, "values are as they were sent")
		require.Empty(t, said[0][2].Failed)
	}
}

// A feature that another rank lacks is named without what a terminal obeys.
func TestAgreeOnForgedTexts(t *testing.T) {
	gs, errs := groups.Join(t, t.Context(), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	require.NoError(t, errors.Join(errs...))
	groups.Each(t, gs, func(i int, g *comm.Group) error {
		failed := []error{nil}
		if i == 1 {
			failed[0] = &device.UnsupportedError{Feature: "\x1b[K", Need: "\r\n", Have: "\x07"}
		}
		return route.Agree(testgpu.Context(t), g, "test", []int{i}, failed, func(all []collective.Said[int]) error {
			x := all[1]
			require.Equal(t, []string{`\x1b[K`, `\x0d\x0a`, `\x07`}, []string{x.Feature, x.Need, x.Have})
			return nil
		})
	})
}

// If the exchange fails, the error says what this process would have said.
func TestAgreeWithoutExchange(t *testing.T) {
	g := groups.Local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}))
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	err := route.Agree(ended, g, "test", []int{1}, []error{errors.New("no memory")}, nil)
	require.EqualError(t, err, "test: no memory\nenough")
}
