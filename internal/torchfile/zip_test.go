package torchfile

import (
	"bytes"
	"encoding/binary"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCheckSums changes each entry of a recording. Recordings have right sums.
func TestCheckSums(t *testing.T) {
	for _, path := range recordings(t) {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		s, err := CheckSums(t.Context(), bytes.NewReader(data), int64(len(data)))
		require.NoError(t, err, path)
		require.Positive(t, s.Checked)
		require.Zero(t, s.Without, path)
	}
	data, err := os.ReadFile("testdata/views.pt")
	require.NoError(t, err)
	a, err := openArchive(bytes.NewReader(data), int64(len(data)))
	require.NoError(t, err)
	for name, e := range a.entries {
		if e.size == 0 {
			continue
		}
		at, err := a.locate(e)
		require.NoError(t, err)
		for _, i := range []int64{at, at + e.size - 1} {
			data[i] ^= 1
			_, err = CheckSums(t.Context(), bytes.NewReader(data), int64(len(data)))
			require.ErrorContains(t, err, "entry \""+name+"\": CRC-32 of ")
			data[i] ^= 1
		}
	}
}

// TestWithoutSums: torch does not compute the sums if set_crc32_options(False) was called.
func TestWithoutSums(t *testing.T) {
	in := archiveOf(false, "x/data.pkl", "abc", "x/empty", "")
	s, err := CheckSums(t.Context(), bytes.NewReader(in), int64(len(in)))
	require.NoError(t, err)
	require.Equal(t, Sums{Checked: 1, Without: 1}, s)
	binary.LittleEndian.PutUint32(in[bytes.Index(in, []byte("PK\x01\x02"))+16:], 7)
	_, err = CheckSums(t.Context(), bytes.NewReader(in), int64(len(in)))
	require.ErrorContains(t, err, `entry "x/data.pkl": CRC-32 of 3 bytes is 352441c2, and 00000007 when they were saved: the file was damaged`)
}
