package fabric_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
)

// falsify returns an exchange that changes the values that this rank announces.
func falsify(t testing.TB, x collective.Exchange, change func(value map[string]any)) collective.Exchange {
	return func(ctx context.Context, mine []byte) ([][]byte, error) {
		var message map[string]any
		d := json.NewDecoder(bytes.NewReader(mine))
		d.UseNumber() // an epoch needs 64 bits
		if d.Decode(&message) == nil {
			if value, ok := message["Value"].(map[string]any); ok {
				change(value)
				var err error
				if mine, err = json.Marshal(message); err != nil {
					t.Error(err)
				}
			}
		}
		return x(ctx, mine)
	}
}

// A rank of this process announces memory that is shorter or longer than that of the other
// ranks: all ranks get an error, and no kernel uses the memory.
func TestScratchOfAnotherLength(t *testing.T) {
	each(t, []int{2, 3}, func(t *testing.T, devs []*device.Device) {
		for name, bytes := range map[string]int{"shorter": 1, "longer": 1 << 20} {
			t.Run(name, func(t *testing.T) {
				before := fabric.Scratches()
				var id any // of the memory of rank 1 of the other group
				owners, errs := openFalsified(t, devs, &fabric.Config{Bytes: bytes}, func(value map[string]any) {
					if value["Scratch"] != nil {
						id = value["Scratch"]
					}
				})
				require.NoError(t, errors.Join(errs...))
				require.NotNil(t, id)
				_, errs = openFalsified(t, devs, &fabric.Config{Bytes: 256 << 10}, func(value map[string]any) {
					if value["Scratch"] != nil {
						value["Scratch"] = id
					}
				})
				for rank, err := range errs {
					require.ErrorContains(t, err, "the memory of rank 1: it has ", "rank %d", rank)
					require.ErrorContains(t, err, " words: want ", "rank %d", rank)
				}
				closeAll(t, owners)
				require.Equal(t, before, fabric.Scratches())
			})
		}
	})
}

// openFalsified opens a rank on each device; change gets the values that rank 1 announces.
func openFalsified(t *testing.T, devs []*device.Device, cfg *fabric.Config, change func(value map[string]any)) ([]member, []error) {
	t.Helper()
	return openBy(t, testgpu.Context(t), devs, func(i int, _ *stream.Stream, seat collective.Exchange) (collective.Exchange, *fabric.Config) {
		if i == 1 {
			seat = falsify(t, seat, change)
		}
		return seat, cfg
	})
}

// A rank of another process announces a handle of fewer or more bytes.
func TestHandleOfAnotherLength(t *testing.T) {
	for _, backend := range []string{"virtual", "cuda"} {
		for _, task := range []string{"short", "long"} {
			t.Run(fmt.Sprint(backend, "/", task), func(t *testing.T) {
				if backend == "cuda" {
					testgpu.Ranks(t, 2)
				}
				processes(t, backend, task, 2)
			})
		}
	}
}

// announcedError is the error of a rank if rank 1 announces a handle of another length.
var announcedError = map[string]string{"short": " words: want ", "long": "it reaches beyond the memory that is shared"}

// falsifyHandle lets rank 1 announce a handle of another length.
func falsifyHandle(t *testing.T, task string, rank int, x collective.Exchange) collective.Exchange {
	by := map[string]int64{"short": -64 << 10, "long": 64 << 10}[task]
	if by == 0 || rank != 1 {
		return x
	}
	return falsify(t, x, func(value map[string]any) {
		if value["Socket"] == nil {
			return // not a handle
		}
		n, err := value["Bytes"].(json.Number).Int64()
		require.NoError(t, err)
		value["Bytes"] = n + by
	})
}
