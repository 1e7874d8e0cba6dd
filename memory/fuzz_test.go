package memory

import (
	"encoding/json"
	"testing"
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
		if a := v.open(p, &q); a.Error == "" {
			t.Fatal("opened without the token")
		}
		if _, files := v.pages(p, &q); len(files) > 0 {
			t.Fatal("files without an opening")
		}
		v.leave(p, q.Export)
	})
}
