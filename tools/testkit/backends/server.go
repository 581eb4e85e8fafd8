// A server whose ServeMux has two resources, /login and /v1/search. It answers with the resource that was reached and
// with what it read of the request, a line each.
package main

import (
	"fmt"
	"net/http"
	"os"
)

func serve(resource string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "resource: %s\npath: %s\n", resource, r.URL.Path)
		fmt.Fprintf(w, "key: %s\nquery: %s\n", r.Header.Get("X-Api-Key"), r.URL.Query().Get("k"))
		if cookie, err := r.Cookie("session"); err == nil {
			fmt.Fprintf(w, "cookie: %s\n", cookie.Value)
		}
	}
}

func main() {
	http.HandleFunc("/login", serve("/login"))
	http.HandleFunc("/v1/search", serve("/v1/search"))
	http.HandleFunc("/", serve("other"))
	if err := http.ListenAndServe(os.Args[1], nil); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
