package memory

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzIPCRequest gives the server of shared memory what another process may ask for.
func FuzzIPCRequest(f *testing.F) {
	f.Add([]byte(`{"Op":"open","Export":1,"Token":"AAAA"}`))
	f.Add([]byte(`{"Op":"pages","Export":1,"From":-1}`))
	f.Add([]byte(`{"Op":"close","Export":18446744073709551615}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var q ipcRequest
		if json.Unmarshal(b, &q) != nil {
			return
		}
		p := &ipcPeer{open: map[*ipcExport]int{}}
		e := &ipcExport{id: 1, token: []byte("a token that nobody knows"), changed: make(chan struct{})}
		v := &ipcServer{exports: map[uint64]*ipcExport{1: e}, peers: map[*ipcPeer]bool{p: true}}
		if a := v.openExport(p, &q); a.Error == "" {
			t.Fatal("opened without the token")
		}
		if _, files := v.pages(p, &q); len(files) > 0 {
			t.Fatal("files without an opening")
		}
		v.closeExport(p, q.Export)
	})
}

// TestHostileAnswers opens memory that another process describes falsely.
func TestHostileAnswers(t *testing.T) {
	pages, segment := &IPCHandle{Offset: 8, Bytes: 8}, &IPCHandle{Offset: 8, Bytes: 8, Segment: []byte{1}}
	require.True(t, (&ipcAnswer{High: 16, Pages: 2, PageBytes: 8}).fits(pages))
	require.True(t, (&ipcAnswer{High: 16}).fits(segment))
	for name, tc := range map[string]struct {
		a ipcAnswer
		h *IPCHandle
	}{
		"negative start":        {ipcAnswer{Low: -16, High: 16, Pages: 2, PageBytes: 8}, &IPCHandle{Offset: -8, Bytes: 8}},
		"negative length":       {ipcAnswer{High: 16}, &IPCHandle{Offset: 8, Bytes: -1, Segment: []byte{1}}},
		"after the end":         {ipcAnswer{High: 15, Pages: 2, PageBytes: 8}, pages},
		"before the start":      {ipcAnswer{Low: 9, High: 32}, segment},
		"more than the pages":   {ipcAnswer{High: 17, Pages: 2, PageBytes: 8}, pages},
		"pages that wrap":       {ipcAnswer{High: 16, Pages: 1<<60 + 2, PageBytes: 16}, pages},
		"pages that wrap twice": {ipcAnswer{High: 16, Pages: math.MaxInt, PageBytes: math.MaxInt}, pages},
		"pages of no bytes":     {ipcAnswer{High: 16, Pages: 2}, pages},
		"negative pages":        {ipcAnswer{High: 16, Pages: -2, PageBytes: -8}, pages},
		"pages of a segment":    {ipcAnswer{High: 16, Pages: 2, PageBytes: 8}, segment},
	} {
		require.False(t, tc.a.fits(tc.h), name)
	}
}

// FuzzIPCAnswer gives the client what the server of another process may answer.
func FuzzIPCAnswer(f *testing.F) {
	f.Add([]byte(`{"Low":0,"High":16,"Pages":2,"PageBytes":8}`), 8, 8)
	f.Add([]byte(`{"Low":-9,"High":9223372036854775807,"Pages":2,"PageBytes":9223372036854775807}`), -8, 1<<62)
	f.Add([]byte(`{"Error":"\u001b[K"}`), 0, 0)
	f.Fuzz(func(t *testing.T, b []byte, offset, bytes int) {
		var a ipcAnswer
		if json.Unmarshal(b, &a) != nil {
			return
		}
		for _, h := range []*IPCHandle{{Offset: offset, Bytes: bytes}, {Offset: offset, Bytes: bytes, Segment: []byte{1}}} {
			if !a.fits(h) {
				continue
			}
			require.True(t, 0 <= offset && offset <= offset+bytes && offset+bytes <= a.High, "%+v", a)
			if a.Pages > 0 {
				require.LessOrEqual(t, uint64(a.High), uint64(a.Pages)*uint64(a.PageBytes))
			}
		}
	})
}
